"""Commit messages that can be searched."""

from tests.commits import Commit, being_made, commits_in, faults_of


def commit(subject: str, body: str = "", num_lines: int = 1) -> Commit:
    return Commit("abc1234", subject, body, num_lines)


def test_a_package_and_an_imperative_are_a_subject():
    for subject in [
        "broker: keep the lease of a client that reconnects",
        "all: move rooms",
        "wire, weightbus: remove what only tests used",
        "docs: README fits on a page",
        "generators: feed pixels as a frame",
    ]:
        assert faults_of(commit(subject)) == []


def test_other_subjects_are_refused():
    for subject, fault in [
        ("wip", "a subject is `package: imperative`"),
        ("Broker: keep it", "a subject is `package: imperative`"),
        ("broker: Keep it", "a lower-case verb"),
        ("broker: an alarm rings again", "no verb"),
        ("broker: fixed the alarm", "no verb"),
        ("broker: keep it.", "full stop"),
        ("broker: " + "keep " * 20, "90 are the most"),
    ]:
        assert any(fault in one for one in faults_of(commit(subject.strip())))


def test_a_large_change_has_a_body():
    assert "no body" in faults_of(commit("broker: keep it", num_lines=31))[0]
    assert faults_of(commit("broker: keep it", "Because.", num_lines=31)) == []


def test_commits_are_read_with_their_size():
    (newest,) = commits_in("-1")
    assert newest.subject
    assert newest.num_lines >= 0


def test_a_commit_that_is_being_made_is_judged_without_its_comments():
    message = "broker: keep leases\n\n# Please enter the commit message\n#\tmodified: x.py\n"
    small = being_made(message, "1\t2\tx.py\n-\t-\tpicture.png\n")
    assert small == Commit("this commit", "broker: keep leases", "", 3)
    assert faults_of(small) == []
    large = being_made(message, "100\t2\tx.py\n")
    assert faults_of(large) == ["102 changed lines and no body with the reason"]
    assert faults_of(being_made("wip\n", "1\t0\tx.py\n"))
