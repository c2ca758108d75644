"""Records and results as a benchmark makes them."""

from tdmpc.benchmarks.results import Record, Results

MACHINE = {"cpu": "abacus", "cores": 2, "threads": 2, "device": "cpu", "torch": "2.6.0", "date": "2026-01-01"}


def record(name="plan", median_s=0.1, **fields):
    return Record(name=name, median_s=median_s, min_s=median_s, p90_s=median_s, first_s=1.0, repeats=5, **fields)


def results(*records, machine=None, config=None):
    return Results(MACHINE | (machine or {}), {"batch_size": 256, "out": None} | (config or {}), list(records))
