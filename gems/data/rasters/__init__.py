"""Files of pixels, read region by region: slides of all vendors, tiled TIFF, pictures."""
