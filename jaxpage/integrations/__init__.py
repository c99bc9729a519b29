"""jaxpage as a part of other projects' programs; each module needs the project of its name."""
