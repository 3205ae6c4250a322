from slipstream.wire.process.token_bucket import TokenBucket


def test_tokens_come_back_with_time_up_to_a_burst():
    bucket = TokenBucket(per_s=2.0, burst=10.0, since_s=100.0)
    assert bucket.refill(100.0) == 10.0
    bucket.tokens -= 9.0
    assert bucket.refill(101.5) == 4.0
    assert bucket.refill(101.5) == 4.0
    assert bucket.refill(1000.0) == 10.0


def test_an_empty_bucket_stays_empty_until_time_passes():
    bucket = TokenBucket(per_s=1.0, burst=5.0, since_s=0.0, tokens=0.0)
    assert bucket.refill(0.0) == 0.0
    assert bucket.refill(0.25) == 0.25
