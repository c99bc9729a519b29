"""Names shapes of real models and steps, for tests (cut small), benchmarks and the tuner."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

MODELS: dict[str, tuple[int, int, int]] = {  # N query heads, K key/value heads, H head width
    "llama-3-8b": (32, 8, 128),
    "llama-3-70b": (64, 8, 128),
    "qwen3-4b": (32, 8, 128),
    "qwen2-0.5b": (14, 2, 64),
    "mistral-7b": (32, 8, 128),
    "opt-13b": (40, 40, 128),
    "gpt2": (12, 12, 64),
    "gpt-oss-20b": (64, 8, 64),
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One call of paged attention by its shapes.

    Row b has `queries[b]` query tokens at the end of `contexts[b]` positions.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    block_size: int = 16
    sliding_window: int | None = None
    tree: bool = False  # the queries are a tree of drafts to verify
    sinks: bool = False
    dtype: str = "bfloat16"
    page_dtype: str = "bfloat16"

    @property
    def max_query_len(self) -> int:
        """Returns the largest number of query tokens of a row."""
        return max(self.queries)

    def cut(self, *, heads: int = 2, rows: int = 3, context: int = 96, queries: int = 40) -> Spec:
        """Returns a small version of the call for an interpreter.

        It has fewer heads in groups of the same size, and fewer and shorter rows.
        """
        num_kv_heads = min(heads, self.num_kv_heads)
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // self.num_kv_heads * num_kv_heads,
            num_kv_heads=num_kv_heads,
            contexts=tuple(
                max(min(length, context), min(new, queries)) for length, new in self._rows(rows)
            ),
            queries=tuple(min(new, queries) for _, new in self._rows(rows)),
            sliding_window=None
            if self.sliding_window is None
            else min(self.sliding_window, context // 3),
        )

    def _rows(self, rows: int) -> list[tuple[int, int]]:
        return list(zip(self.contexts, self.queries, strict=True))[:rows]


def _spec(
    model: str, name: str, contexts: list[int], queries: list[int], **settings: object
) -> Spec:
    num_heads, num_kv_heads, width = MODELS[model]
    spec = Spec(
        name=f"{model} {name}",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=width,
        contexts=tuple(contexts),
        queries=tuple(queries),
    )
    return dataclasses.replace(spec, **settings)  # type: ignore[arg-type]


def _decode(model: str, batch: int, context: int, **settings: object) -> Spec:
    return _spec(model, f"decode {batch}x{context}", [context] * batch, [1] * batch, **settings)


def _chunk(model: str, tokens: int, before: int = 0, **settings: object) -> Spec:
    return _spec(model, f"chunk {tokens}+{before}", [before + tokens], [tokens], **settings)


def _verify(model: str, batch: int, drafts: int, context: int, **settings: object) -> Spec:
    kind = "tree" if settings.get("tree") else "chain"
    return _spec(
        model,
        f"verify {kind} {batch}x{drafts}",
        [context + drafts] * batch,
        [1 + drafts] * batch,
        **settings,
    )


def _contexts_of_batch(num: int, max_length: int) -> list[int]:
    """Returns the contexts of a batch in service: from short to long, in no order."""
    return [1 + (max_length - 1) * ((7 * i) % num) // max(1, num - 1) for i in range(num)]


SPECS: tuple[Spec, ...] = (
    *(_decode("llama-3-8b", batch, 2048) for batch in (1, 4, 16, 64, 256)),
    _decode("llama-3-8b", 1, 32768),
    _decode("llama-3-8b", 16, 8192),
    _spec("llama-3-8b", "decode 64 ragged", _contexts_of_batch(64, 4096), [1] * 64),
    *(_decode("llama-3-70b", batch, 2048) for batch in (16, 64)),
    _decode("qwen3-4b", 64, 2048),
    _decode("qwen2-0.5b", 64, 2048),
    _decode("mistral-7b", 64, 8192, sliding_window=4096),
    _decode("opt-13b", 64, 1024),
    _decode("gpt2", 64, 512),
    _decode("gpt-oss-20b", 64, 2048, sinks=True),
    *(
        _decode("llama-3-8b", batch, 2048, page_dtype=dtype)
        for dtype in ("int8", "uint8")
        for batch in (64, 16)
    ),
    *(
        dataclasses.replace(
            _decode("llama-3-8b", 64, 2048, block_size=size),
            name=f"llama-3-8b decode in blocks of {size}",
        )
        for size in (32, 64, 128)
    ),
    *(_chunk("llama-3-8b", tokens) for tokens in (128, 512, 2048)),
    _chunk("llama-3-8b", 512, before=3584),
    _chunk("llama-3-70b", 2048),
    _chunk("opt-13b", 2048),
    _chunk("gpt2", 512),
    _chunk("mistral-7b", 2048, before=6144, sliding_window=4096),
    _chunk("gpt-oss-20b", 2048, before=2048, sliding_window=128, sinks=True),
    *(_verify("llama-3-8b", 16, drafts, 2048) for drafts in (4, 8, 16)),
    *(_verify("llama-3-8b", 16, drafts, 2048, tree=True) for drafts in (16, 63)),
    _verify("llama-3-8b", 64, 4, 2048),
    _spec(
        "llama-3-8b",
        "mixed 48 decodes and 2 chunks",
        [*_contexts_of_batch(48, 2048), 512, 2000],
        [1] * 48 + [512, 500],
    ),
)


def find(name: str) -> Spec:
    """Returns the spec of that name.

    Raises:
        KeyError: There is none; the text lists the names.
    """
    for spec in SPECS:
        if spec.name == name:
            return spec
    raise KeyError(
        f"no shape is named {name!r}; there are: {', '.join(spec.name for spec in SPECS)}"
    )


@dataclass(frozen=True, kw_only=True)
class MatmulSpec:
    """One grouped product by its shapes: rows spread over groups (experts), or one weight.

    Attributes:
        name: The name.
        num_rows: The rows of x.
        num_in: The inputs of the weight.
        num_out: The outputs of the weight.
        num_groups: The number of groups, each with a weight of its own.
        code: The code of the weight (see `QuantizedWeight`); None for a weight of x's type.
        group_size: The inputs that share a scale.
        zeros: True if the weight has zeros.
        dtype: The type of x.
    """

    name: str
    num_rows: int
    num_in: int
    num_out: int
    num_groups: int = 1
    code: str | None = None
    group_size: int = 0
    zeros: bool = False
    dtype: str = "bfloat16"

    def cut(self) -> MatmulSpec:
        """Returns a small version of the product for an interpreter."""
        num_groups = min(self.num_groups, 5)
        return dataclasses.replace(
            self, num_rows=40, num_in=min(self.num_in, 512), num_out=72, num_groups=num_groups
        )

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of all groups' weights, with their scales and zeros."""
        num_weights = self.num_groups * self.num_out * self.num_in
        if self.code is None:
            return 2 * num_weights
        packed = self.code in ("int4", "fp4")
        of_groups = 4 * (2 if self.zeros else 1) * (num_weights // self.group_size)
        return num_weights // (2 if packed else 1) + of_groups


_EXPERTS = MatmulSpec(
    name="qwen3-30b-a3b experts", num_rows=8, num_groups=128, num_in=2048, num_out=1536
)
_MORE_EXPERTS = MatmulSpec(
    name="gpt-oss-20b experts", num_rows=4, num_groups=32, num_in=2880, num_out=5760
)
_GATE_UP = MatmulSpec(name="llama-3-8b gate_up", num_rows=1, num_in=4096, num_out=28672)
_DOWN = MatmulSpec(name="llama-3-8b down", num_rows=1, num_in=14336, num_out=4096)


def _matmul(
    of_token: MatmulSpec,
    tokens: int,
    code: str | None = None,
    group_size: int = 0,
    zeros: bool = False,
) -> MatmulSpec:
    kind = "" if code is None else f", {code}" + (" with zeros" if zeros else "")
    return dataclasses.replace(
        of_token,
        name=f"{of_token.name}, {tokens} tokens{kind}",
        num_rows=tokens * of_token.num_rows,
        code=code,
        group_size=group_size,
        zeros=zeros,
    )


MATMULS: tuple[MatmulSpec, ...] = (
    *(_matmul(_EXPERTS, tokens) for tokens in (1, 64, 2048)),
    _matmul(_EXPERTS, 64, "int4", 32),
    _matmul(_EXPERTS, 64, "fp8", 128),
    _matmul(_MORE_EXPERTS, 64, "fp4", 32),
    *(_matmul(_GATE_UP, tokens, "int4", 32) for tokens in (16, 64, 512)),
    _matmul(_DOWN, 16, "int4", 32),
    _matmul(_GATE_UP, 16, "int4", 128, zeros=True),
    _matmul(_GATE_UP, 16, "int8", 32),
    *(_matmul(each, 16, "fp8", 128) for each in (_GATE_UP, _DOWN)),
)
