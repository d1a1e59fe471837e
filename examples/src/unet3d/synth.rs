//! Synthetic labelled volumes.

use burn_spatial_io::synth::{AnatomyConfig, generate_anatomies};
use indicatif::ProgressBar;

use super::cli::SynthArgs;
use crate::common::{Error, ranks};

/// `unet3d synth`.
///
/// # Errors
/// [`Error::Synth`] when files cannot be made, [`Error::Usage`] in one of several processes.
pub fn run(args: &SynthArgs) -> Result<(), Error> {
    ranks::alone("synth")?;
    let SynthArgs { size, count, start, seed, noise, bias, .. } = *args;
    let config = AnatomyConfig { size, count, start, seed, noise, bias };
    let bar = ProgressBar::new(count as u64);
    let paths = generate_anatomies(&config, &args.out, |done| bar.set_position(done as u64))?;
    bar.finish_and_clear();
    println!("{} volumes of {size}^3 with {} classes in {}", paths.len(), AnatomyConfig::CLASSES, args.out.display());
    Ok(())
}
