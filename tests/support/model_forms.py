"""Configs of small models, by family: with the registry they make entries of `model_configs.MODELS`.

A family costs its file, its line in the registry, and a line here if one config of the usual sizes
does not show all that its config.json can ask for.
"""

from __future__ import annotations

from typing import Any

from jaxpage.models.registry import FAMILIES

Fields = dict[str, Any]

# Sizes, for families whose fields do not have the names of Llama's.
_LAYERS = {"vocab_size": 131, "num_hidden_layers": 2, "max_position_embeddings": 128}
_GPT2 = {"vocab_size": 131, "n_layer": 2, "n_positions": 128}
SIZES: dict[str, Fields] = {"opt": _LAYERS, "gpt2": _GPT2, "falcon": _LAYERS}

# What config.json says beyond the sizes, by the module of a family and the name of the form.
FORMS: dict[str, dict[str, Fields]] = {}


def forms_of_registry(known: dict[str, tuple[str, Fields]]) -> dict[str, tuple[str, Fields]]:
    """Returns an entry for each form; a family that has no form and is not known gets "plain"."""
    found = {}
    seen = {model_type.removesuffix("_text") for model_type, _ in known.values()}
    for module in dict.fromkeys(FAMILIES.values()):
        forms = FORMS.get(module, {} if module in seen else {"plain": {}})
        for form, fields in forms.items():
            found[f"{module.replace('_', '-')}-{form}"] = module, fields
    return found
