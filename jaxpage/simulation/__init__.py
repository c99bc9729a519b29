"""The scheduler of the engine, driven by a cost model instead of a device: what a schedule costs, in virtual and in host time."""
