"""Everything that users set: the engine, sampling, speculation; where settings come from and how they are checked. Never imports jax."""
