"""What is private in Inductor: its compiler of graphs and of C++, its scheduler, the files that it generates."""
