"""Reads the source of a chat template, without rendering it."""

from __future__ import annotations

import functools

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The renderer itself gives a template these names.
_VARIABLES = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "raise_exception",
}


class _Generation(Extension):
    """Parses the tag `{% generation %}` of transformers, which marks the assistant's text.

    It exists only so that templates with this tag can be parsed.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])


def parse_template(template: str) -> nodes.Template:
    """Returns the tree of a template.

    Raises:
        TemplateSyntaxError: It is no template.
    """
    return _ENVIRONMENT.parse(template)


@functools.lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """Returns the variables that a template reads and does not set.

    The names that the renderer gives it are left out; among them are those of special tokens and
    `strftime_now`, which are known by their endings.
    """
    try:
        names = meta.find_undeclared_variables(parse_template(template))
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(
        name
        for name in names - _VARIABLES - _ENVIRONMENT.globals.keys()
        if not name.endswith(("_token", "_now", "_tokens"))
    )
