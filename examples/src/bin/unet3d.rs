//! Trains the 3D U-Net on volumes split over ranks: `unet3d --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    burn_spatial_examples::unet3d::main()
}
