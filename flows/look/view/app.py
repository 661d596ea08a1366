"""The terminal application behind `quiver view`: versions → groups → rollouts → tokens.

    ViewApp(store, paired).run()        # rollouts of one version, or of two side by side
    ViewApp(store, run="arith").run()   # begins with the list of versions

Only the shown page is read. A thread reads whole columns once something is sorted, filtered or
searched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static
from textual.worker import get_current_worker

from quiver.flows.look.describe import HEADER, Listed, describe, listed
from quiver.flows.look.joined import Selection
from quiver.flows.look.paired import Paired, pair
from quiver.flows.look.words import number
from quiver.schemas.errors import QuiverError, for_terminal, printable
from quiver.schemas.refs import Ref
from quiver.stages.core.store import Store
from quiver.stages.core.store.readable import readable_entries

from .details import LEGEND, OBSERVED, sections_of, token_rows
from .plain import cells_of, columns_of

PAGE = 100
"""Rows per page."""
_MOST_TOKENS = 4000
"""Most rows in the table of tokens."""
_MOST_TURNS = 200
"""Most turns shown of an episode on its own screen."""
_FEW_TURNS = 12
"""Most turns shown of an episode below the list of rollouts."""
_MARGIN = 4
"""Screen columns left for a table's scroll bar and edges."""
_QUESTIONS = {
    "search": "text in the prompt or the completion; empty: all",
    "where": "such as: reward < 0.5, finish_reason = length   (empty: all)",
}
_GROUP_ORDERS = ("position", "mean", "std", "min", "max", "count")


def plain(text: Any, style: str = "") -> Text:
    """Return untrusted text without markup; control characters are escaped."""
    return Text(for_terminal(text), style)


class TableScreen(Screen):
    """A screen with a title, a paged table, and an input line."""

    BINDINGS: ClassVar = [
        ("escape", "back", "Back"),
        ("n", "page(1)", "Next"),
        ("p", "page(-1)", "Before"),
        ("question_mark", "app.keys", "Keys"),
        ("q", "app.quit", "Quit"),
    ]

    def __init__(self, columns: Sequence[tuple[str, int | None]]) -> None:
        super().__init__()
        self.columns = columns
        """Title and width of each column; None: as wide as its cells."""
        self.start = 0
        """The first row of the page, counted from 0."""
        self.total = 0
        self.answered: Callable[[str], None] | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield DataTable(id="rows", cursor_type="row", zebra_stripes=True)
        yield from self.below()
        yield Input(id="ask")
        yield Footer(compact=True)

    def below(self) -> ComposeResult:
        """Yield the widgets below the table."""
        yield from ()

    def on_mount(self) -> None:
        self.query_one("#ask").display = False
        for title, width in self.columns:
            self.table.add_column(title, width=width)
        self.load()

    @property
    def table(self) -> DataTable:
        return self.query_one("#rows", DataTable)

    def load(self) -> None:
        """Read the page in a thread, then show it."""
        self.table.loading = True
        self.read_page()

    @work(thread=True, exclusive=True)
    def read_page(self) -> None:
        """Call `page` in a thread; if it fails, show the error and keep the old page."""
        worker = get_current_worker()
        try:
            title, rows = self.page()
        except QuiverError as error:
            self.app.call_from_thread(self.show_error, error)
            return
        if not worker.is_cancelled:
            self.app.call_from_thread(self.show_page, title, rows)

    def page(self) -> tuple[str, list[list[str]]]:
        """Return the title and the cells of this page's rows. Runs in a thread."""
        raise NotImplementedError

    def show_page(self, title: str, rows: list[list[str]]) -> None:
        """Put the page's rows into the table."""
        last = self.start + len(rows)
        place = f"{self.start + 1:,}–{last:,} of {self.total:,}" if rows else "nothing"
        self.query_one("#title", Static).update(plain(f"{title}  ·  {place}"))
        self.table.clear()
        for row in rows:
            self.table.add_row(*map(plain, row))
        self.table.loading = False
        self.table.focus()

    def show_error(self, error: QuiverError) -> None:
        """Show an error."""
        self.table.loading = False
        self.table.focus()
        self.app.notify(for_terminal(error), severity="error", markup=False, timeout=10)

    def ask(self, question: str, text: str, answered: Callable[[str], None]) -> None:
        """Ask for a line of text, and pass it to `answered`."""
        self.answered = answered
        field = self.query_one("#ask", Input)
        field.placeholder = question
        field.value = text
        field.display = True
        field.focus()

    @on(Input.Submitted, "#ask")
    def answer(self, event: Input.Submitted) -> None:
        """Take the answer."""
        self.query_one("#ask").display = False
        self.table.focus()
        self.answered(event.value)

    def action_page(self, step: int) -> None:
        """Show another page."""
        start = self.start + step * PAGE
        if 0 <= start < self.total:
            self.start = start
            self.load()

    def action_back(self) -> None:
        """Close the input line, or leave this screen."""
        field = self.query_one("#ask", Input)
        if field.display:
            field.display = False
            self.table.focus()
        elif len(self.app.screen_stack) > 2:
            self.app.pop_screen()


class VersionsScreen(TableScreen):
    """The versions of a store or a run, newest first."""

    def __init__(self, store: Store, run: str | None) -> None:
        super().__init__([(name, None) for name in HEADER])
        self.store = store
        self.run = run
        self.shown: list[Ref | QuiverError] = []
        """Content of each row of the page: a version, or the error that made it unreadable."""

    def page(self) -> tuple[str, list[list[str]]]:
        entries, unreadable = readable_entries(self.store, self.run)
        entries.sort(key=lambda pair: pair[1].created, reverse=True)
        self.total = len(unreadable) + len(entries)
        page = [*unreadable, *entries][self.start : self.start + PAGE]
        errors = [entry for entry in page if isinstance(entry, QuiverError)]
        versions = page[len(errors) :]
        self.shown = [*errors, *(ref for ref, _ in versions)]
        rows = [Listed(printable(f"{error.object}: {error.message}", 60)) for error in errors]
        return f"versions of {self.run or self.store.url}", rows + listed(self.store, versions)

    @on(DataTable.RowSelected, "#rows")
    def open(self, event: DataTable.RowSelected) -> None:
        """Open the rollouts of a version, or its description if it has none."""
        chosen = self.shown[event.cursor_row]
        if isinstance(chosen, QuiverError):
            self.show_error(chosen)
            return
        try:
            self.app.push_screen(RowsScreen(pair(self.store, str(chosen), None)))
        except QuiverError:
            try:
                lines = describe(self.store, self.store.open(chosen), PAGE)
            except QuiverError as error:
                self.show_error(error)
            else:
                self.app.push_screen(TextScreen("\n".join(lines)))


class TextScreen(Screen):
    """A screen with text."""

    BINDINGS: ClassVar = [("escape", "app.pop_screen", "Back"), ("q", "app.quit", "Quit")]

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(plain(self.text))
        yield Footer(compact=True)


class GroupsScreen(TableScreen):
    """A table with one row per prompt: number of rollouts; mean, spread, least and largest
    reward."""

    BINDINGS: ClassVar = [("s", "sort", "Sort")]

    def __init__(self, paired: Paired) -> None:
        numbers = [(name, 9) for name in ("mean", "std", "min", "max")]
        super().__init__([("prompt", 60), ("rollouts", 8), *numbers])
        self.paired = paired
        self.sort = "position"
        self.group_ids: list[str] = []

    def page(self) -> tuple[str, list[list[str]]]:
        joined = self.paired.first
        groups = joined.groups()
        if self.sort != "position":
            groups = groups.sort_by([(self.sort, "descending")])
        self.total = len(groups)
        shown = groups.slice(self.start, PAGE)
        self.group_ids = shown["group_id"].to_pylist()
        first_rows = joined.rows(shown["position"].to_pylist())
        rows = [
            [
                printable(row.get("prompt", row["group_id"]), 60),
                str(group["count"]),
                *(number(group[name]) for name in ("mean", "std", "min", "max")),
            ]
            for row, group in zip(first_rows, shown.to_pylist(), strict=True)
        ]
        order = "as stored" if self.sort == "position" else f"highest {self.sort} first"
        return f"{joined.title}  ·  prompts, {joined.score_name} of each  ·  {order}", rows

    def action_sort(self) -> None:
        """Sort by the next column."""
        self.sort = _GROUP_ORDERS[(_GROUP_ORDERS.index(self.sort) + 1) % len(_GROUP_ORDERS)]
        self.start = 0
        self.load()

    @on(DataTable.RowSelected, "#rows")
    def open(self, event: DataTable.RowSelected) -> None:
        """Look at the rollouts of one prompt."""
        selection = Selection(group=self.group_ids[event.cursor_row])
        self.app.push_screen(RowsScreen(self.paired, selection))


class RowsScreen(TableScreen):
    """A table of rollouts, with the details of the rollout under the cursor below."""

    BINDINGS: ClassVar = [
        ("slash", "choose('search')", "Search"),
        ("f", "choose('where')", "Filter"),
        ("s", "sort", "Sort"),
        ("b", "order_by('best')", "Best"),
        ("w", "order_by('worst')", "Worst"),
        ("x", "order_by('random')", "Random"),
        ("m", "order_by('change')", "Changed"),
        ("c", "colour", "Colour"),
        ("g", "groups", "Groups"),
        ("v", "versions", "Versions"),
    ]

    def __init__(self, paired: Paired, selection: Selection | None = None) -> None:
        super().__init__(())
        self.paired = paired
        self.joined = paired.first
        self.selection = Selection()
        self.asked: Selection | None = selection or Selection()
        """A selection whose order is still to be read; it is taken if it can be read."""
        self.order: Any = range(len(self.joined))
        """Positions of the selected rollouts."""
        self.shown: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Each row of this page and its partner."""

    def below(self) -> ComposeResult:
        with Horizontal(id="details"):
            yield VerticalScroll(Static(id="side0"), classes="detail")
            if self.paired.second is not None:
                yield VerticalScroll(Static(id="side1"), classes="detail second")

    def on_mount(self) -> None:
        self.table_columns = columns_of(self.paired, self.app.size.width - _MARGIN)
        self.columns = [(column.title, column.width) for column in self.table_columns]
        super().on_mount()

    def page(self) -> tuple[str, list[list[str]]]:
        asked, self.asked = self.asked, None
        if asked is not None:
            try:
                self.order = self.joined.order(asked)
                self.selection = asked
                self.start = 0
            except QuiverError as error:
                self.app.call_from_thread(self.show_error, error)
        self.total = len(self.order)
        positions = self.order[self.start : self.start + PAGE]
        rows = self.joined.rows(positions)
        self.shown = list(zip(rows, self.paired.partners(positions), strict=True))
        cells = [cells_of(self.paired, *pair, self.table_columns) for pair in self.shown]
        selection = self.selection
        texts = self.paired.titles
        if selection.sort == "random":
            texts.append("random order")
        elif selection.sort:
            direction = "highest" if selection.descending else "lowest"
            texts.append(f"{direction} {selection.sort} first")
        texts += [f"where group_id = {selection.group}"] if selection.group else []
        texts += [f"where {selection.where}"] if selection.where.strip() else []
        texts += [f"with “{selection.search}”"] if selection.search else []
        return "  ·  ".join(texts), cells

    def select(self, **changes: Any) -> None:
        """Show other rollouts, or the same in another order."""
        self.asked = replace(self.selection, **changes)
        self.load()

    def sort_by(self, name: str) -> None:
        """Sort by a column, highest first; a second time in a row reverses the order."""
        is_again = self.selection.sort == name and self.selection.descending
        self.select(sort=name, descending=not is_again)

    def show_page(self, title: str, rows: list[list[str]]) -> None:
        super().show_page(title, rows)
        self.show_details()

    @on(DataTable.RowHighlighted, "#rows")
    def show_details(self) -> None:
        """Show the details of the rollout under the cursor, and of its partner."""
        index = self.table.cursor_row
        rows = self.shown[index] if index < len(self.shown) else ({}, {})
        sides = self.paired.sides(*rows)
        width = self.app.size.width // len(sides) - 5
        for place, (name, joined, row) in enumerate(sides):
            sections = sections_of(joined, row, self.app.colouring, width, name, _FEW_TURNS)
            text = Text("\n\n").join(section.text for section in sections)
            self.query_one(f"#side{place}", Static).update(text)

    @on(DataTable.RowSelected, "#rows")
    def open(self, event: DataTable.RowSelected) -> None:
        """Look at the tokens of a rollout."""
        if event.cursor_row < len(self.shown):
            self.app.push_screen(TokensScreen(self.paired, *self.shown[event.cursor_row]))

    @on(DataTable.HeaderSelected, "#rows")
    def sort_by_header(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the clicked column."""
        if name := self.table_columns[event.column_index].name:
            self.sort_by(name)

    def action_order_by(self, name: str) -> None:
        """Sort by reward or score, shuffle, or put first what changed most."""
        sort = self.joined.score_name if name in ("best", "worst") else name
        if sort not in ("random", *self.joined.numbers):
            self.app.notify(f"this version has no {name}", severity="warning")
            return
        self.select(sort=sort, descending=name in ("best", "change"))

    def action_choose(self, name: str) -> None:
        """Ask for the text or the conditions that the rollouts must fulfil."""
        text = getattr(self.selection, name)
        self.ask(_QUESTIONS[name], text, lambda answer: self.select(**{name: answer}))

    def action_sort(self) -> None:
        """Ask for the column to sort by."""
        self.ask(f"sort by one of {', '.join(self.joined.numbers)}", "", self.sort_by)

    def action_colour(self) -> None:
        """Colour tokens by the next quantity."""
        self.app.next_colouring()
        self.show_details()

    def action_groups(self) -> None:
        """Look at the prompts."""
        self.app.push_screen(GroupsScreen(self.paired))

    def action_versions(self) -> None:
        """Look at the versions of the run."""
        self.app.push_screen(VersionsScreen(self.joined.store, self.joined.ref.run))


class TokensScreen(Screen):
    """One rollout, token by token and turn by turn, beside its partner if there is one."""

    BINDINGS: ClassVar = [
        ("escape", "app.pop_screen", "Back"),
        ("n", "turn(1)", "Next turn"),
        ("p", "turn(-1)", "Turn before"),
        ("c", "colour", "Colour"),
        ("q", "app.quit", "Quit"),
    ]

    def __init__(self, paired: Paired, row: dict[str, Any], partner: dict[str, Any]) -> None:
        super().__init__()
        self.sides = [side for side in paired.sides(row, partner) if side[2]]
        self.place = 0
        """Index of the section at the top."""
        self.turns: list[list[int | None]] = [[] for _ in self.sides]
        """The turn of each section, by side."""
        self.turn_rows: list[dict[int, int]] = [{} for _ in self.sides]
        """Table row in which each turn begins, by side."""

    def compose(self) -> ComposeResult:
        with Horizontal():
            for index in range(len(self.sides)):
                with Vertical(classes="side" if index == 0 else "side second"):
                    yield VerticalScroll(id=f"text{index}", classes="detail")
                    yield DataTable(id=f"tokens{index}", cursor_type="row", zebra_stripes=True)
        yield Footer(compact=True)

    async def on_mount(self) -> None:
        for index in range(len(self.sides)):
            self.fill_table(index)
        self.query_one("#tokens0").focus()
        await self.show_texts()

    def fill_table(self, side: int) -> None:
        """Fill a side's table with the rollout's tokens, sampled or observed."""
        _, joined, row = self.sides[side]
        tokens = joined.tokens(row["position"])
        table = self.query_one(f"#tokens{side}", DataTable)
        numbers = tokens.numbers
        skipped = 0 if joined.has_turns else 1  # the column of turns
        table.add_columns(*["turn", "", "token", "id", *numbers][skipped:])
        for count, token in enumerate(islice(token_rows(joined, tokens), _MOST_TOKENS)):
            self.turn_rows[side].setdefault(token.turn, count)
            place, style, values = "", OBSERVED, [""] * len(numbers)
            if token.place is not None:
                place, style = token.place + 1, ""
                values = [number(values[token.place]) for values in numbers.values()]
            cells = [token.turn, place, repr(token.text)[1:-1], token.id, *values]
            table.add_row(*(plain(cell, style) for cell in cells[skipped:]))

    async def show_texts(self) -> None:
        """Show the sections of each side, coloured."""
        width = self.app.size.width // len(self.sides) - 5
        for index, (name, joined, row) in enumerate(self.sides):
            sections = sections_of(joined, row, self.app.colouring, width, name, _MOST_TURNS)
            self.turns[index] = [section.turn for section in sections]
            pane = self.query_one(f"#text{index}")
            await pane.remove_children()
            kind = "section" if len(sections) > 1 else ""
            await pane.mount_all(Static(section.text, classes=kind) for section in sections)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the turn keys only for episodes."""
        return action != "turn" or any("turns" in row for _, _, row in self.sides)

    def action_turn(self, step: int) -> None:
        """Move to the next or previous turn, in the text and in the table."""
        self.place = min(max(self.place + step, 0), max(map(len, self.turns)) - 1)
        for index, turns in enumerate(self.turns):
            place = min(self.place, len(turns) - 1)
            pane = self.query_one(f"#text{index}")
            pane.scroll_to_widget(pane.children[place], top=True, animate=False)
            row = self.turn_rows[index].get(turns[place])
            if row is not None:
                self.query_one(f"#tokens{index}", DataTable).move_cursor(row=row)

    async def action_colour(self) -> None:
        """Colour tokens by the next quantity."""
        self.app.next_colouring()
        await self.show_texts()


class ViewApp(App):
    """The application; see the module's docstring."""

    TITLE = "quiver view"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title { padding: 0 1; background: $panel; text-style: bold; }
    #rows { height: 1fr; }
    #details { height: 1fr; border-top: solid $primary; }
    .detail { padding: 0 1; }
    .section { margin-bottom: 1; }
    .second { border-left: solid $primary; }
    .side { width: 1fr; }
    .side DataTable { height: 1fr; border-top: solid $primary; }
    """

    def __init__(
        self,
        store: Store,
        paired: Paired | None = None,
        selection: Selection | None = None,
        run: str | None = None,
    ) -> None:
        super().__init__()
        self.first_screen = (
            VersionsScreen(store, run) if paired is None else RowsScreen(paired, selection)
        )
        self.colouring = "logprob"

    def on_mount(self) -> None:
        self.push_screen(self.first_screen)

    def action_keys(self) -> None:
        """Show all keys, or hide them."""
        if self.screen.query("HelpPanel"):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()

    def next_colouring(self) -> None:
        """Colour by the next quantity."""
        names = list(LEGEND)
        self.colouring = names[(names.index(self.colouring) + 1) % len(names)]
