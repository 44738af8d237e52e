"""The header of a method: plain data that refuses mistakes which would otherwise go unnoticed."""

import pytest

from freshet.core.about import About, Range, Remark, UploadCount
from freshet.errors import ConfigError


def test_a_header_needs_only_four_strings():
    about = About("mine", "sync", "Mine", "Me, 2025")
    assert (about.names, about.marks(), about.replaces) == (("mine",), {}, "arrival")
    assert (dict(about.space), about.curves) == ({}, ())


def test_names_and_marks():
    about = About("a", "async", "A", "-", {"a-0": {}}, reconstructed=True, remark=Remark("*", "half of it"))
    assert about.names == ("a", "a-0")
    assert list(about.marks()) == ["R", "*"] and about.marks()["*"] == "half of it"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"kind": "asynchronous"}, r"^a.about.kind: must be 'async' or 'sync', but 'asynchronous' was given$"),
        ({"replaces": "never"}, r"^a.about.replaces: must be 'arrival' or 'aggregation', but 'never' was given$"),
    ],
)
def test_an_unknown_kind_is_an_error(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        About(**({"name": "a", "kind": "async", "title": "A", "citation": "-"} | wrong))


def test_a_range_clips_and_only_an_upload_count_depends_on_the_run():
    each = Range(0.1, 2.0, log=True)
    assert (each.clip(0.0), each.clip(0.5), each.clip(9.0)) == (0.1, 0.5, 2.0)
    assert each.within(1) is each
    assert UploadCount(2, 20, whole=True).within(8) == Range(2, 8, whole=True)
    assert UploadCount(2, 20, whole=True).within(1) == Range(1, 1, whole=True)
