"""Small parquet files in the layout of the Hugging Face hub."""

import io

import numpy as np


def encoded(pixels, kind="PNG"):
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write(path, images, labels, image="image", label="label"):
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = [{"bytes": data, "path": f"{k}.png"} for k, data in enumerate(images)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({image: pa.array(cells, kind), label: pa.array(labels, pa.int64())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def random_pixels(n, shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)
