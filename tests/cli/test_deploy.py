"""What ``freshet deploy`` prints when a run has ended."""

from freshet.cli.deploy import trip_cost_lines


def test_seconds_of_a_trip_are_printed_by_phase() -> None:
    phases = {
        "down": 1.5,
        "start": 0.5,
        "import": 2.0,
        "load": 0.25,
        "train": 9.0,
        "up": 1.0,
        "whole": 14.25,
        "cpu": 3.0,
    }
    lines = trip_cost_lines({"uploads": 7, "messages": 9, "trips": 8, "trip_seconds": phases})
    assert lines[0] == "seconds of a trip (medians of 7 uploads; 9 messages for 8 trips):"
    assert [line.split()[2] for line in lines[1:]] == ["down", "start", "import", "load", "train", "up", "whole"]
    assert trip_cost_lines({"trip_seconds": {}}) == []
