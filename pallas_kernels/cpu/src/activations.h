// Computes the functions between two products, on vectors.
#pragma once

#include <type_traits>

#include "rows.h"
#include "vec.h"

namespace jaxpage {
namespace JAXPAGE_ISA {

// Returns the error function within 2 ulp: a quotient of polynomials of x^2, times x. From 4 on it
// is 1 in float32. A NaN may become any number, so that callers must multiply by x.
static inline Vec erf(Vec x) {
  x = max(splat(-4.0f), select(x < splat(4.0f), x, splat(4.0f)));
  const Vec square = x * x;
  Vec above = splat(-2.72614225801306e-10f);
  above = multiply_add(above, square, splat(2.77068142495902e-08f));
  above = multiply_add(above, square, splat(-2.10102402082508e-06f));
  above = multiply_add(above, square, splat(-5.69250639462346e-05f));
  above = multiply_add(above, square, splat(-7.34990630326855e-04f));
  above = multiply_add(above, square, splat(-2.95459980854025e-03f));
  above = multiply_add(above, square, splat(-1.60960333262415e-02f));
  Vec below = splat(-1.45660718464996e-05f);
  below = multiply_add(below, square, splat(-2.13374055278905e-04f));
  below = multiply_add(below, square, splat(-1.68282697438203e-03f));
  below = multiply_add(below, square, splat(-7.37332916720468e-03f));
  below = multiply_add(below, square, splat(-1.42647390514189e-02f));
  return x * above / below;
}

inline Vec activate(Activation activation, Vec x) {
  switch (activation) {
    case Activation::kNone: return x;
    // `exp` takes numbers up to 88.
    case Activation::kSilu: return x / (splat(1.0f) + exp(-max(x, splat(-87.0f))));
    case Activation::kGelu: return splat(0.5f) * x * (splat(1.0f) + erf(x * splat(0.70710678f)));
    default: break;
  }
  const Vec inner = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
  return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
}

// Calls run(activation) with the activation as a constant.
template <typename Run>
inline void dispatch_activation(Activation activation, const Run& run) {
  switch (activation) {
    case Activation::kNone: return run(std::integral_constant<Activation, Activation::kNone>());
    case Activation::kSilu: return run(std::integral_constant<Activation, Activation::kSilu>());
    case Activation::kGelu: return run(std::integral_constant<Activation, Activation::kGelu>());
    default: return run(std::integral_constant<Activation, Activation::kGeluTanh>());
  }
}

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
