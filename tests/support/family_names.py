"""Names the families by the model type of their configs."""

from __future__ import annotations

from jaxpage.models.registry import FAMILIES, load_page

# transformers does not have these; each has a test file of its own, tests/test_<module>.py.
OUTSIDE = {"DeciLMForCausalLM"}
FAMILY_OF = {
    architecture: load_page(entry).Spec.model_type.removesuffix("_text")
    for architecture, entry in FAMILIES.items()
    if architecture not in OUTSIDE
}
