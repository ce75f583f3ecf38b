"""Private APIs of Inductor: its compiler of graphs and of C++, its scheduler, the files that it generates."""
