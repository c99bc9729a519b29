"""Names the families: by the model type of their configs, or by their module where they are no pages."""

from __future__ import annotations

from jaxpage.models.registry import FAMILIES, load_page


def name_family(entry: str) -> str:
    """Returns the name of a family of the registry."""
    if ":" not in entry:
        return entry
    return load_page(entry).Spec.model_type.removesuffix("_text")


# transformers does not have these; each has a test file of its own, tests/test_<module>.py.
OUTSIDE = {"DeciLMForCausalLM"}
FAMILY_OF = {
    architecture: name_family(entry)
    for architecture, entry in FAMILIES.items()
    if architecture not in OUTSIDE
}
