"""What every room uses: errors, types, files, threads, checks of arguments. It knows no other room."""
