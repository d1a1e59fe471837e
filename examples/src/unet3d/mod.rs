//! The 3D U-Net.
