"""Forward passes: transformers' modules as reference, and the CPU decoder. ``build.py`` chooses and proves one."""
