"""When each action runs, what it needs in memory, and which weights it reads."""
