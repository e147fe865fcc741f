"""Linear algebra by matrix products on tensor cores: split fp16, packed triangles, Newton inverses, Jacobi bases."""
