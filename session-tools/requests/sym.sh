python3 -c "import sys; print(sys.version)"; pip list 2>/dev/null | grep -i -E "torch|triton|transformers|llguid|pytest|fastapi" 
