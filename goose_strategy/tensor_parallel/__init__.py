"""Split a layer over the tensor parallel ranks."""
