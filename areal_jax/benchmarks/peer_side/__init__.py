"""Programs that other projects' Pythons run: they import nothing of this project, whose dependencies those Pythons do not have."""
