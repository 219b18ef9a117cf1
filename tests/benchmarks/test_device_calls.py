"""Calls of a save on a device: the training thread copies within the device, and waits for nothing."""

from benchmarks.device_calls import measure


def test_a_save_of_many_tensors_asks_little_of_the_training_thread():
    figures = measure(2, blocks=4, width=16)

    training = figures["training"]
    assert training["waits"] == 0
    assert training["calls"]["copy_on_device"] == training["enqueued"] == 2  # a file each
    assert training["calls"]["record_current"] == 1
    assert "copy_to_host" not in training["calls"]
    assert figures["copies"]["waits"] == figures["copies"]["enqueued"] > 0
    assert figures["tensors"] == 4 * (4 * 8 + 2)
