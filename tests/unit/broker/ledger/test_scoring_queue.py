from slipstream.broker.ledger.scoring_queue import MAX_GRANTED_BYTES, ScoringQueue


def filled(*keys: tuple[int, int]) -> ScoringQueue:
    queue = ScoringQueue(lease_s=10.0)
    for key in keys:
        queue.add(key)
    return queue


def test_first_come_first_scored_up_to_the_credits():
    queue = filled((0, 0), (0, 1), (1, 0))
    assert list(queue.lease("worker-0", 2, now_s=0.0).values()) == [(0, 0), (0, 1)]
    assert (queue.num_waiting, queue.num_leased, queue.leases_of("worker-0")) == (1, 2, 2)


def test_no_more_bytes_are_granted_at_a_time_than_a_worker_can_hold():
    queue = filled((0, 0), (0, 1), (0, 2), (0, 3))
    third = MAX_GRANTED_BYTES // 3

    def granted(num_bytes: int) -> list[tuple[int, int]]:
        return list(queue.lease("worker-0", 8, now_s=0.0, size_of=lambda _: num_bytes).values())

    assert granted(2 * MAX_GRANTED_BYTES) == [(0, 0)], "one that is larger is granted alone"
    assert granted(third + 1) == [(0, 1), (0, 2)]


def test_a_trajectory_added_twice_is_scored_once():
    queue = filled((0, 0), (0, 0))
    assert list(queue.lease("worker-0", 8, now_s=0.0).values()) == [(0, 0)]


def test_what_lapses_goes_back_to_the_front_and_its_late_result_does_not_count():
    queue = filled((0, 0), (1, 0))
    (lease_id,) = queue.lease("worker-0", 1, now_s=0.0)
    assert queue.expire(10.0) == []
    assert queue.expire(10.1) == [((0, 0), "worker-0")]
    again = queue.lease("worker-1", 1, now_s=11.0)
    assert list(again.values()) == [(0, 0)]
    assert not queue.finish("worker-0", lease_id, (0, 0))
    assert queue.finish("worker-1", next(iter(again)), (0, 0))


def test_a_result_counts_once_and_for_the_holder_only():
    queue = filled((0, 0))
    (lease_id,) = queue.lease("worker-0", 1, now_s=0.0)
    assert not queue.finish("worker-1", lease_id, (0, 0))
    assert not queue.finish("worker-0", lease_id, (0, 1))
    assert queue.finish("worker-0", lease_id, (0, 0))
    assert not queue.finish("worker-0", lease_id, (0, 0))


def test_a_heartbeat_extends_what_is_held_and_names_what_is_not():
    queue = filled((0, 0), (0, 1))
    first, second = queue.lease("worker-0", 2, now_s=0.0)
    assert queue.heartbeat("worker-0", (first, 77), now_s=8.0) == [77]
    assert queue.heartbeat("worker-1", (second,), now_s=8.0) == [second]
    assert queue.expire(12.0) == [((0, 1), "worker-0")]
    assert queue.leases_of("worker-0") == 1


def test_a_worker_that_starts_anew_gives_everything_back():
    queue = filled((0, 0), (0, 1))
    queue.lease("worker-0", 1, now_s=0.0)
    queue.lease("worker-1", 1, now_s=0.0)
    queue.release_all("worker-0")
    assert (queue.num_waiting, queue.leases_of("worker-1")) == (1, 1)


def test_trajectory_of_an_ended_group_is_discarded_waiting_or_leased():
    queue = filled((0, 0), (0, 1))
    (lease_id,) = queue.lease("worker-0", 1, now_s=0.0)
    queue.discard((0, 0))
    queue.discard((0, 1))
    queue.discard((9, 9))
    assert (queue.num_waiting, queue.num_leased) == (0, 0)
    assert not queue.finish("worker-0", lease_id, (0, 0))


def test_groups_are_granted_whole_or_not_at_all_and_the_first_whatever_its_size():
    queue = filled((0, 0), (1, 0), (1, 1), (2, 1))

    def siblings_of(group_id: int) -> tuple[int, ...]:
        return () if group_id == 0 else (0, 1)  # group 0 is still being generated

    first = queue.lease("worker", 1, now_s=0.0, siblings_of=siblings_of)
    assert list(first.values()) == [(1, 0), (1, 1)]
    again = queue.lease("worker", 4, now_s=0.0, siblings_of=siblings_of)
    assert list(again.values()) == [(2, 0), (2, 1)], "with the sibling that has its reward"
    assert queue.lease("worker", 4, now_s=0.0, siblings_of=siblings_of) == {}
    assert list(queue.lease("other", 4, now_s=0.0).values()) == [(0, 0)]


def test_a_group_of_which_somebody_has_a_part_is_not_granted_whole():
    queue = filled((0, 0), (0, 1))
    queue.lease("a", 1, now_s=0.0)
    assert queue.lease("b", 4, now_s=0.0, siblings_of=lambda _group: (0, 1)) == {}


def test_what_one_worker_could_not_score_is_kept_for_another_as_long_as_there_is_one():
    queue = filled((0, 0), (1, 0))
    queue.lease("b@1", 1, now_s=0.0)
    (lease_id, *_) = queue.lease("a@1", 1, now_s=0.0)
    assert queue.finish("a@1", lease_id, (1, 0))
    queue.failed((1, 0), "a", now_s=0.0)
    assert queue.lease("a@2", 1, now_s=2.0) == {}
    assert list(queue.lease("b@1", 1, now_s=2.0).values()) == [(1, 0)]
    queue.release_all("b@1")  # it left: there is no other
    assert list(queue.lease("a@2", 2, now_s=3.0).values()) == [(1, 0), (0, 0)]


def test_a_failure_is_tried_again_after_longer_and_longer_pauses():
    queue = filled((0, 0))
    now_s = 0.0
    for pause_s in (1.0, 4.0, 16.0, 30.0, 30.0):
        (lease_id,) = queue.lease("a", 1, now_s=now_s)
        assert queue.finish("a", lease_id, (0, 0))
        queue.failed((0, 0), "a", now_s=now_s)
        assert queue.lease("a", 1, now_s=now_s + pause_s - 0.1) == {}
        now_s += pause_s


def test_a_late_result_counts_for_what_was_leased_so_and_is_still_there():
    queue = filled((0, 0))
    (lease_id,) = queue.lease("a", 1, now_s=0.0)
    assert not queue.lapsed("a", lease_id, (0, 0)), "it is held"
    queue.expire(10.1)
    assert queue.lapsed("a", lease_id, (0, 0))
    assert not queue.lapsed("a", lease_id, (0, 1))
    assert not queue.lapsed("b", lease_id, (0, 0)), "it never was another's"
    queue.discard((0, 0))  # its group ended, or was begun anew under the same number
    assert not queue.lapsed("a", lease_id, (0, 0))


def test_what_was_granted_and_never_arrived_waits_again_without_an_attempt():
    queue = filled((0, 0), (0, 1))
    queue.release(queue.lease("a", 2, now_s=0.0))
    assert set(queue.lease("a", 2, now_s=0.0).values()) == {(0, 0), (0, 1)}


def test_silent_worker_does_not_block_a_retry_by_another():
    queue = filled((0, 0))
    queue.lease("b@1", 0, now_s=0.0)
    queue.failed((0, 0), "a", now_s=0.0)
    assert queue.lease("a@1", 1, now_s=9.0) == {}
    assert list(queue.lease("a@1", 1, now_s=10.1).values()) == [(0, 0)]


def test_leases_of_scoring_and_of_generation_have_different_numbers():
    (lease_id,) = filled((0, 0)).lease("worker", 1, now_s=0.0)
    assert lease_id >= 1 << 40


def test_names_of_workers_that_died_are_forgotten():
    queue = ScoringQueue(lease_s=10.0)
    for pid in range(2_000):
        queue.lease(f"host-{pid}@x", 1, now_s=float(pid))
    assert len(queue._seen) <= 300


# ---- a group in doubt --------------------------------------------------------


def test_until_a_sibling_that_failed_has_its_reward_the_others_of_its_group_wait():
    queue = filled((0, 0), (0, 1), (0, 2), (1, 0))
    (lease_id,) = queue.lease("worker-0", 1, now_s=0.0)
    assert queue.finish("worker-0", lease_id, (0, 0))
    queue.failed((0, 0), "worker-0", now_s=0.0)
    assert list(queue.lease("worker-1", 8, now_s=0.1).values()) == [(1, 0)]
    assert queue.num_waiting == 3
    (again,) = queue.lease("worker-1", 8, now_s=1.1).items()
    assert again[1] == (0, 0)
    queue.finish("worker-1", again[0], (0, 0))
    queue.discard((0, 0))  # it has its reward
    assert list(queue.lease("worker-1", 8, now_s=1.2).values()) == [(0, 1), (0, 2)]


def test_of_several_that_failed_the_one_that_failed_most_often_decides():
    queue = filled((0, 0), (0, 1), (0, 2))
    for lease_id, key in queue.lease("worker-0", 2, now_s=0.0).items():
        queue.finish("worker-0", lease_id, key)
        queue.failed(key, "worker-0", now_s=0.0)
    (lease_id,) = queue.lease("worker-0", 8, now_s=2.0)
    queue.finish("worker-0", lease_id, (0, 0))
    queue.failed((0, 0), "worker-0", now_s=2.0)
    assert list(queue.lease("worker-0", 8, now_s=20.0).values()) == [(0, 0)]
    for sibling in range(3):  # its group was dropped
        queue.discard((0, sibling))
    assert (queue.num_waiting, queue.num_leased) == (0, 0)
    assert not queue._failed_of
    assert not queue._held_back


def test_what_a_worker_gives_back_is_no_attempt_and_only_its_own():
    queue = filled((0, 0))
    (lease_id,) = queue.lease("worker-0", 1, now_s=0.0)
    assert not queue.give_back("worker-1", lease_id)
    assert queue.give_back("worker-0", lease_id)
    assert not queue.give_back("worker-0", lease_id)
    for now_s in range(1_000):
        (lease_id,) = queue.lease("worker-0", 1, now_s=float(now_s))
        assert queue.give_back("worker-0", lease_id)
    assert not queue._lapsed
    assert queue.num_given_back == 1_001


def test_a_group_that_a_function_takes_whole_is_granted_whole_though_one_of_it_failed():
    queue = filled((0, 0), (0, 1))
    for lease_id, key in queue.lease("w", 2, now_s=0.0).items():
        queue.finish("w", lease_id, key)
        queue.failed(key, "w", now_s=0.0)
    granted = queue.lease("w", 8, now_s=5.0, siblings_of=lambda _: (0, 1))
    assert sorted(granted.values()) == [(0, 0), (0, 1)]


def test_a_generator_is_granted_what_it_delivered_and_may_try_it_again():
    queue = ScoringQueue(lease_s=10.0)
    queue.add((0, 0), deliverer="g0")
    queue.add((0, 1), deliverer="g1")
    assert list(queue.lease("g0@a", 8, now_s=0.0, own_only=True).values()) == [(0, 0)]
    assert queue.lease("g0@a", 8, now_s=0.0, own_only=True) == {}
    queue.release_all("g0@a")
    queue.failed((0, 0), "g0", now_s=0.0)
    assert queue.lease("g1@a", 8, now_s=2.0, own_only=True) == {}, "its sibling decides first"
    assert list(queue.lease("g0@b", 8, now_s=2.0, own_only=True).values()) == [(0, 0)]


def test_answers_of_a_generator_that_is_gone_fail_once_a_term_while_no_worker_is_there():
    queue = ScoringQueue(lease_s=10.0)
    queue.add((0, 0), deliverer="g0")
    queue.add((1, 0), deliverer="g1")
    assert queue.abandoned(0.0) == []
    queue.lease("g1@a", 0, now_s=9.0, own_only=True)
    assert queue.abandoned(11.0) == [((0, 0), "g0")]
    assert queue.abandoned(12.0) == [], "another term has begun"
    queue.heartbeat("g0@a", (), now_s=20.0)
    assert queue.abandoned(29.0) == [((1, 0), "g1")]
    queue.lease("w@a", 0, now_s=30.0)
    assert queue.abandoned(32.0) == [], "a worker may score them"
    queue.discard((0, 0))
    assert queue.abandoned(60.0) == [((1, 0), "g1")]
