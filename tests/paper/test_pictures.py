"""The pictures can be drawn."""

from freshet.paper.archive import read
from freshet.paper.pictures import draw_study, draw_worlds
from freshet.paper.studies import STUDIES, StudyRuns

from .archived_runs import write_run


def test_the_picture_of_a_study_is_drawn(archive, tmp_path):
    draw_study(STUDIES[0], read(archive), tmp_path / "results.png")
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_the_picture_of_worlds_is_drawn_from_what_was_run(archive, tmp_path):
    write_run(archive / "suites" / "skew" / "Dirichlet-0.1", "fedbuff", 0, [0.3] * 31, None)
    draw_worlds(StudyRuns(STUDIES[0], read(archive), archive / "suites"), tmp_path / "worlds.png")
    assert (tmp_path / "worlds.png").stat().st_size > 10_000
