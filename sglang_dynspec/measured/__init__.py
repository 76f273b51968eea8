"""Throughput that somebody has measured: what ``simulate`` and ``advise`` work from."""

from sglang_dynspec.measured.table import Curve, Point, Table, read_table, shipped_tables

__all__ = ["Curve", "Point", "Table", "read_table", "shipped_tables"]
