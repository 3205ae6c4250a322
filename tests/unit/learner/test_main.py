from slipstream.learner.main import gpu_variables

CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_what_the_user_has_set_stays():
    for found, added in [
        ({"PATH": "/bin"}, CONNECTIONS | SEGMENTS),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, SEGMENTS),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, CONNECTIONS),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, CONNECTIONS),
    ]:
        assert gpu_variables(found) == added
