from slipstream.learner.model.weights.quantized import number_trouble

SHAPE, BLOCK = (8, 12), (8, 8)


def test_floats_and_blocks_with_their_scales_are_weights():
    for dtype, block, scales in [
        ("BF16", None, None),
        ("F32", BLOCK, None),
        ("F8_E4M3", BLOCK, (1, 2)),
    ]:
        assert number_trouble("w", dtype, SHAPE, block, scales) == ""


def test_other_numbers_are_not():
    for dtype, shape, block, scales, message in [
        ("F8_E4M3", SHAPE, BLOCK, None, "w is F8_E4M3, and its scales are missing (w_scale_inv)"),
        ("F8_E4M3", SHAPE, None, None, "w is F8_E4M3, expected BF16, F16, F32, F64, or F8_E4M3"),
        (
            "F8_E4M3",
            SHAPE,
            BLOCK,
            (1, 1),
            "must have shape [1, 2] for blocks of [8, 8], got [1, 1]",
        ),
        ("F8_E4M3", SHAPE, BLOCK, (2, 2), "shape [1, 2] for blocks of [8, 8], got [2, 2]"),
        ("F8_E4M3", SHAPE, BLOCK, (2,), "shape [1, 2] for blocks of [8, 8], got [2]"),
        ("F8_E4M3", (8,), BLOCK, (1,), "expected BF16, F16, F32, F64, or F8_E4M3 of two axes"),
        ("F8_E5M2", SHAPE, BLOCK, (1, 2), "w is F8_E5M2, expected"),
        ("F32", SHAPE, BLOCK, (1, 2), "w is F32 and comes with scales (w_scale_inv), expected"),
        ("I8", SHAPE, None, None, "w is I8, expected"),
    ]:
        assert message in number_trouble("w", dtype, shape, block, scales)
