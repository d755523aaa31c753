"""What the operating system asks for: forks, descriptors that run out, native libraries."""
