"""What connects two ranks: their links, the windows of these, and a rank's place among all."""
