"""jaxpage as a part of other projects' programs, each a module of its name."""
