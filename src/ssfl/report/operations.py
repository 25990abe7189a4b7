"""The parts of the page about the running itself: where the time went, and whose work counted."""

from ssfl.report import parts
from ssfl.report.charts import Series, line_chart
from ssfl.report.record import Record
from ssfl.report.words import duration

_REASONS = {
    "error": "failed with an error",
    "lost": "lost",
    "deadline": "past the deadline",
    "refused": "refused",
}
_LATE = {"drop": "dropped", "discount": "counted at a discount"}
"""What becomes of replies that come late, by `server.late`."""


def timing(record: Record) -> str:
    """One bar for the whole, a line for each part of it, and the rounds."""
    spent = record.seconds
    if not spent:
        return ""
    total = sum(seconds for _, seconds in spent)
    split = [(name, seconds, duration(seconds)) for name, seconds in spent]
    rows = [
        (f"protocols: {part}" if part else name, seconds)
        for name, whole in spent
        for part, seconds in (record.judging if name.startswith("protocols") else [("", whole)])
    ]
    lines = [
        (name, "", seconds, duration(seconds)) for name, seconds in rows if seconds > 0.0005 * total
    ]
    drawing = parts.shares(split) + parts.bars(lines, most=max(row[2] for row in lines))
    legend = [(name, i) for i, (name, _, _) in enumerate(split)]
    figures = [parts.figure("timing", f"Where {duration(total)} went", drawing, legend=legend)]
    rounds = record.curve("round", "seconds")
    if len(rounds) > 1:
        drawing = line_chart([Series("seconds", rounds, 0)], "Seconds per round")
        figures.append(parts.figure("seconds", "Seconds per round", drawing))
    return parts.section("timing", "Time", parts.grid(*figures, wide=True))


def replies(record: Record) -> str:
    """How many replies were asked for, how many counted, what became of the others, and by what
    rules."""
    asked = sum(row.get("asked") or 0 for row in record.rounds)
    if not asked:
        return ""
    counted = sum(row.get("accepted") or 0 for row in record.rounds)
    failures = record.failures
    reasons = [*_REASONS, *(reason for reason in failures if reason not in _REASONS)]
    tiles = [(f"{asked:,}", "replies asked for"), (f"{counted:,}", "counted")]
    tiles += [(f"{failures[name]:,}", _REASONS.get(name, name)) for name in reasons]
    tiles.append((f"{record.late:,}", f"came late, {_LATE[record.run.config.server.late]}"))
    resumed = sum(1 for row in record.rows if row["kind"] == "resume")
    if resumed:
        tiles.append((f"{resumed:,}", "times stopped and resumed"))
    return parts.section(
        "replies",
        "Replies and failures",
        parts.tiles(tiles),
        intro=_rules(record),
    )


def _rules(record: Record) -> str:
    """What the server was told to do about clients that fail."""
    server = record.run.config.server
    asked = server.clients_per_round or record.clients
    spare = f" and {100 * server.oversample:g} % spares" if server.oversample else ""
    wait = f"waits {duration(server.deadline)} for them" if server.deadline else "waits for them"
    tries = "once" if server.retries == 1 else f"{server.retries} times"
    again = f", asking those that failed again up to {tries}," if server.retries else ""
    return (
        f"Each round the server asks {asked:,} of {record.clients:,} clients{spare}, "
        f"{wait}, and needs {100 * server.min_replies:g} % of the replies{again} or stops with "
        f"its state saved. Late replies are {_LATE[server.late]}; an update that is not finite, or "
        f"longer for its steps than {server.max_norm_ratio:g} times the last round's median, is "
        "refused."
    )
