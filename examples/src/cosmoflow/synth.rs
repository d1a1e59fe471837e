//! Synthetic universes.

use burn_spatial_io::synth::{Parameter, SynthConfig, generate};
use indicatif::ProgressBar;

use super::cli::SynthArgs;
use crate::common::{Error, ranks};

fn parameter(name: &str) -> Result<Parameter, Error> {
    let known = Parameter::ALL.map(Parameter::name);
    let found = Parameter::ALL.into_iter().find(|p| p.name().eq_ignore_ascii_case(name.trim()));
    found.ok_or_else(|| Error::Usage(format!("--vary: there is no parameter {name}, only {}", known.join(", "))))
}

/// `cosmoflow synth`.
///
/// # Errors
/// [`Error::Usage`] for an unknown parameter and in one of several processes, [`Error::Synth`] when files cannot be made.
pub fn run(args: &SynthArgs) -> Result<(), Error> {
    ranks::alone("synth")?;
    let config = SynthConfig {
        grid: args.grid_size,
        cell: args.cell,
        count: args.count,
        start: args.start,
        seed: args.seed,
        spread: args.spread,
        vary: args.vary.iter().map(|name| parameter(name)).collect::<Result<_, _>>()?,
        fixed_box: args.fixed_box,
        ..SynthConfig::default()
    };
    let bar = ProgressBar::new(args.count as u64);
    let paths = generate(&config, &args.out, |done| bar.set_position(done as u64))?;
    bar.finish_and_clear();
    println!("{} universes of 4 x {}^3 in {}", paths.len(), args.grid_size, args.out.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_found_by_name() {
        assert_eq!(parameter("omega_m").unwrap(), Parameter::OmegaM);
        assert_eq!(parameter(" H_0").unwrap(), Parameter::H0);
        let message = parameter("w_0").unwrap_err().to_string();
        assert_eq!(message, "--vary: there is no parameter w_0, only Omega_m, sigma_8, N_spec, H_0");
    }
}
