"""Opens models whose weights are arrays in memory."""

from jaxpage.checkpoints.in_memory.parameters import (
    ModelConfig,  # says what a caller may give as config.json
    Parameters,  # says what a caller may give as weights
    check_all_finite,  # refuses weights that are no numbers
    name_parameters,  # gives the arrays of a loaded model by their names in its checkpoint
    open_parameters,  # opens a model whose weights are arrays in memory
    with_parameters,  # gives the same model with other weights
)
