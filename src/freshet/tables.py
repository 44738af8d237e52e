"""Tables that print whole. pandas is imported with this module, so import it where a table is made."""

from collections.abc import Callable
from typing import Any

import pandas as pd

#: Longer tables are printed as pandas prints them, with dots in the middle.
MAX_ROWS = 1_000


class Table(pd.DataFrame):
    """A DataFrame that prints all its rows and columns, where pandas leaves some out. What is cut from it is plain."""

    @property
    def _constructor(self) -> Callable[..., pd.DataFrame]:
        return pd.DataFrame

    def __repr__(self) -> str:
        return str(self.to_string()) if len(self) <= MAX_ROWS else str(pd.DataFrame(self))

    def _repr_html_(self) -> Any:
        whole = (None, None) if len(self) <= MAX_ROWS else (None, 60)
        with pd.option_context("display.max_columns", whole[0], "display.max_rows", whole[1]):
            return pd.DataFrame(self)._repr_html_()  # type: ignore[operator]
