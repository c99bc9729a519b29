"""Has the encoders of pictures, a module for each lineage."""
