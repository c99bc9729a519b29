"""One step of the engine after another: the only place where the host packages and the device packages meet."""
