"""Suites of measurements, one module each: `run` of the module that `suite=` names does all of it."""
