"""Suites of measurements, one module each: `run(config)` of the module that `suite=` names does all of it."""
