"""Stub."""
def write(data, output): print("rows", data["rows"])
