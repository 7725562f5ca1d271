"""The formats that data come in, one file each: images, tables, arrays, LEAF, downloads."""
