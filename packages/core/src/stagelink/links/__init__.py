"""Links between two ranks, their windows, and a rank's node among all."""
