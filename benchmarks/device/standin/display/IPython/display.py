"""What sglang.utils imports."""

HTML = Image = display = None
