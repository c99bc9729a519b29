"""Names the tensors of MTP heads: modules in a checkpoint that predict further tokens, to draft."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxpage.models.config.fields import Fields

MAX_HEADS = 64


@dataclass(frozen=True)
class MtpNames:
    """Says where a checkpoint has its MTP heads, if it has them; its tensors decide.

    Attributes:
        count: The number of heads that config.json counts.
        field: The field of config.json with that number.
        prefixes: The beginnings of the names of all heads' tensors, as a checkpoint has them.
        layer: The decoder layer of the first head.
        projection: The product that fuses the embedding and the hidden state.
        embedding_norm: The norm of the embedding.
        hidden_norm: The norm of the hidden state.
        output_norm: The norm after the layer.
        shared: Globs over tensors that are not read: tables, which are copies of the model's, and
            what the family does not read of its own layers.
        refusal: The reason why the head cannot be used; empty if it can.
        hidden_first: Whether the product takes the hidden state before the embedding.
    """

    count: int
    field: str
    prefixes: tuple[str, ...]
    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    output_norm: str
    shared: tuple[str, ...] = ()
    refusal: str = ""
    hidden_first: bool = False

    @property
    def globs(self) -> tuple[str, ...]:
        """Returns globs over the names of the heads' tensors."""
        return tuple(f"{prefix}*" for prefix in self.prefixes)


def no_heads(fields: Fields) -> None:
    """Returns None: the family has no MTP heads."""


def read_numbered_names(fields: Fields, *not_read: str) -> MtpNames | None:
    """Returns the names of DeepSeek's form: layers whose numbers follow that of the last layer.

    The result is None if the config counts no heads.

    Args:
        fields: The fields of the config.
        *not_read: Globs over tensors of a layer that the family does not read.
    """
    field = "num_nextn_predict_layers"
    count = fields.integer(field, 0, minimum=0)
    if count > MAX_HEADS:
        fields.note_wrong(f"{field} = {count} is above {MAX_HEADS}", **{field: 0})
    if not 0 < count <= MAX_HEADS:
        return None
    last = fields.integer("num_hidden_layers")
    layer = f"model.layers.{last}"
    numbers = range(last, last + count)
    return MtpNames(
        count,
        field,
        tuple(f"{start}layers.{number}." for number in numbers for start in ("", "model.")),
        layer,
        f"{layer}.eh_proj",
        f"{layer}.enorm",
        f"{layer}.hnorm",
        f"{layer}.shared_head.norm",
        ("*.embed_tokens.weight", "*.shared_head.head.weight", *not_read),
    )


def name_separate_heads(count: int, field: str, refusal: str = "") -> MtpNames:
    """Returns the names of Qwen's form: a module of its own, `mtp`, outside of the model.

    Args:
        count: The number of heads that config.json counts.
        field: The field of config.json with that number.
        refusal: See `MtpNames`.
    """
    return MtpNames(
        count,
        field,
        ("mtp.",),
        "mtp.layers.0",
        "mtp.fc",
        "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden",
        "mtp.norm",
        refusal=refusal,
    )


def unread_heads(fields: Fields, start: str = "mtp.") -> MtpNames:
    """Returns the names of MTP heads that are not loaded, and that no method can use.

    Args:
        fields: The fields of the config. The number of heads may be null.
        start: The beginning of the names of all heads' tensors.
    """
    field = "num_nextn_predict_layers"
    count = 0 if fields.get(field, None) is None else fields.integer(field, 0, minimum=0)
    names = name_separate_heads(count, field, "heads of this family are not read")
    return replace(names, prefixes=(start,))


def counts_heads(fields: Fields) -> bool:
    """Returns whether the config counts MTP heads, in families most of whose files have none."""
    return fields.get("num_nextn_predict_layers", None) not in (None, 0)
