"""Fills in Prefect's forms. Fields are found by their labels."""

from __future__ import annotations

from typing import Any


def field(page: Any, title: str, within: str = "") -> Any:
    """The innermost box of the form with this label; `within`: the label of a box around it."""
    box = '//label[normalize-space()="{}"]/ancestor::*[contains(concat(" ", @class, " "), " p-label ")][1]'
    inner = box.format(title)
    return page.locator(f"xpath={box.format(within)}{inner}" if within else f"xpath={inner}").first


def write(page: Any, title: str, value: str, within: str = "", *, kind: str = "") -> None:
    """Types a value; `kind`: the tab to choose first where there are several."""
    box = field(page, title, within)
    if kind:
        box.get_by_text(kind, exact=True).first.click()
    box.locator("input, textarea").first.fill(value)


def unfold(page: Any, title: str, within: str = "") -> None:
    """Opens a folded group: chooses its tab in place of None."""
    box = field(page, f"{title} (Optional)", within)
    box.get_by_text(title, exact=True).last.click()


def choose(page: Any, title: str, value: str, within: str = "") -> None:
    """Chooses from a menu."""
    menu = field(page, title, within).locator(".p-select-button__control")
    menu.focus()
    menu.press("ArrowDown")  # a synthetic click opens the menu and closes it again
    page.get_by_role("option", name=value, exact=True).click()
