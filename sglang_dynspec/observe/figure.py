"""An empty figure to draw on. Needs matplotlib: ``pip install 'sglang-dynspec[demo]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dynspec.errors import DynspecError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120


def check_matplotlib() -> None:
    """Raise a DynspecError unless charts can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DynspecError(
            "drawing needs matplotlib; pip install 'sglang-dynspec[demo]'"
        ) from error


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of a size in inches.

    Raises:
        DynspecError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no global state, and no window system asked.
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
