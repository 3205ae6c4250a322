"""What only a borrowed GPU shows, as one command; on a CPU the same work on tiny sizes."""
