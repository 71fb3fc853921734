"""Cloud Storage with one bucket, for tests of TensorFlow's own `gs://` client.

with CloudStorage() as storage:
    os.environ.update(storage.environ)
    tf.io.gfile.listdir("gs://bucket")
"""

from __future__ import annotations

from tfdist.vertex.local import bucket as emulator


class CloudStorage(emulator.CloudStorage):
    """An emulator with one bucket, and the proxy in front of it.

    Args:
        bucket: Its name.
    """

    def __init__(self, bucket: str = "bucket"):
        super().__init__(bucket)
