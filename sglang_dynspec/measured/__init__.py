"""Throughput that somebody has measured: what ``simulate`` and ``advise`` work from."""

from sglang_dynspec.measured.curves import Curve, Point, Table
from sglang_dynspec.measured.table import parse_table, read_table, shipped_tables

__all__ = ["Curve", "Point", "Table", "parse_table", "read_table", "shipped_tables"]
