use super::field::Cube;
use super::*;

/// Mean spectrum of the counts, (Mpc/h)^3, in shells of one fundamental wave number from the first: 1024 boxes of 32^3
/// cells of 4 Mpc/h at the center of the priors, one particle a cell, from an independent generator in Python (numpy,
/// 2LPT). Rows are redshifts 0, 0.5, 1.5 and 3. Statistical error 1 % in the first shell, 0.2 % in the last.
const REFERENCE: [[f64; 7]; 4] = [
    [9369.8, 4381.5, 2513.7, 1587.2, 1011.5, 682.5, 490.5],
    [5790.0, 2764.1, 1609.5, 1039.3, 685.1, 484.0, 366.0],
    [2474.9, 1201.8, 704.8, 461.5, 311.8, 228.3, 179.1],
    [753.8, 388.2, 249.4, 174.4, 126.1, 96.2, 77.0],
];

fn center(grid: usize, cell: f64, ppc: usize) -> SynthConfig {
    SynthConfig { grid, cell, ppc, spread: 0.0, seed: 5, ..SynthConfig::default() }
}

/// Mean power in shells `[m + 1/2, m + 3/2)` of the fundamental wave number.
fn shells(cube: &Cube, counts: &[i16], channel: usize, shells: usize) -> Vec<f64> {
    let cells = cube.n.pow(3) as f64;
    let field: Vec<f64> = counts.iter().skip(channel).step_by(4).map(|c| f64::from(*c)).collect();
    let mean = field.iter().sum::<f64>() / cells;
    let spectrum = cube.spectrum(field.iter().map(|c| c / mean - 1.0));
    let (mut power, mut modes) = (vec![0.0; shells], vec![0.0; shells]);
    for (i, mode) in spectrum.iter().enumerate().skip(1) {
        let shell = ((cube.wave_squared(i) as f64).sqrt() - 0.5) as usize;
        if shell < shells {
            power[shell] += mode.norm_sqr() * cube.length.powi(3) / (cells * cells);
            modes[shell] += 1.0;
        }
    }
    power.iter().zip(modes).map(|(p, n)| p / n).collect()
}

#[test]
fn counts_hold_every_particle() {
    for ppc in [1, 2] {
        let made = universe(&SynthConfig { grid: 12, ppc, ..SynthConfig::default() }, 3).unwrap();
        for channel in 0..4 {
            let sum: i64 = made.counts.iter().skip(channel).step_by(4).map(|c| i64::from(*c)).sum();
            assert_eq!(sum, (12 * ppc as i64).pow(3));
        }
        assert!(made.counts.iter().all(|c| *c >= 0));
    }
}

#[test]
fn threads_do_not_matter() {
    let config = SynthConfig { grid: 16, seed: 9, ..SynthConfig::default() };
    let with = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| universe(&config, 2).unwrap());
    let one = with(1);
    assert_eq!(one, with(2));
    assert_eq!(one, with(5));
    assert_ne!(one.counts, universe(&config, 3).unwrap().counts);
}

#[test]
fn linear_field_has_the_sigma_8_asked() {
    let cosmology = Cosmology::new(0.3, 0.8, 0.96, 70.0);
    // A box of 256 Mpc/h holds all but 0.2 % of sigma_8.
    let cube = Cube::new(64, 256.0);
    let boxes = 24;
    let variance: f64 = (0..boxes)
        .map(|index| {
            let density = cube.linear_density(&cosmology, 11, index);
            let filtered = |(i, mode): (usize, &rustfft::num_complex::Complex64)| {
                let k = (cube.wave_squared(i) as f64).sqrt() * cube.fundamental();
                mode.norm_sqr() * cosmology::top_hat(8.0 * k).powi(2)
            };
            // Parseval: the mean square of the filtered field.
            density.iter().enumerate().map(filtered).sum::<f64>() / (cube.n.pow(3) as f64).powi(2)
        })
        .sum::<f64>()
        / boxes as f64;
    assert!((variance.sqrt() / 0.8 - 1.0).abs() < 0.02, "sigma_8 {}", variance.sqrt());
}

#[test]
fn spectrum_agrees_with_the_reference() {
    let config = center(32, 4.0, 1);
    let cube = Cube::new(32, 128.0);
    let boxes = 256;
    let mut mean = [[0.0; 7]; 4];
    for index in 0..boxes {
        let made = universe(&config, index).unwrap();
        for (channel, mean) in mean.iter_mut().enumerate() {
            let power = shells(&cube, &made.counts, channel, 7);
            mean.iter_mut().zip(power).for_each(|(mean, p)| *mean += p / boxes as f64);
        }
    }
    for (got, want) in mean.iter().flatten().zip(REFERENCE.iter().flatten()) {
        assert!((got / want - 1.0).abs() < 0.1, "{mean:?}");
    }
}

#[test]
fn settings_out_of_range_are_named() {
    let field = |config: SynthConfig| match universe(&config, 0) {
        Err(SynthError::Config { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    let base = SynthConfig::default();
    assert_eq!(field(SynthConfig { grid: 1, ..base.clone() }), "grid");
    assert_eq!(field(SynthConfig { ppc: 0, ..base.clone() }), "ppc");
    assert_eq!(field(SynthConfig { cell: f64::NAN, ..base.clone() }), "cell");
    assert_eq!(field(SynthConfig { spread: 0.9, ..base }), "spread");
}

#[test]
fn only_chosen_parameters_vary() {
    let config = SynthConfig { grid: 8, vary: vec![Parameter::OmegaM, Parameter::Sigma8], fixed_box: true, ..SynthConfig::default() };
    let made = universe(&config, 0).unwrap();
    assert!(made.unit[0] != 0.0 && made.unit[1] != 0.0);
    assert_eq!(made.unit[2..], [0.0; 2]);
    assert_eq!(made.physical[2..], [0.96, 70.0]);
    assert_eq!(made.length, 32.0);
    let all = universe(&SynthConfig { vary: Parameter::ALL.into(), fixed_box: false, ..config }, 0).unwrap();
    assert_eq!(all.unit[..2], made.unit[..2]);
    assert!((all.length / 32.0 - f64::from(all.physical[3]) / 70.0).abs() < 1e-6);
}

#[test]
fn settings_round_trip() {
    let config = SynthConfig { vary: vec![Parameter::Sigma8, Parameter::H0], ..SynthConfig::default() };
    let text = serde_json::to_string(&config).unwrap();
    assert!(text.contains(r#""vary":["sigma_8","h_0"]"#), "{text}");
    assert_eq!(serde_json::from_str::<SynthConfig>(&text).unwrap(), config);
    assert_eq!(serde_json::from_str::<SynthConfig>("{}").unwrap(), SynthConfig::default());
    assert!(serde_json::from_str::<SynthConfig>(r#"{"grids": 3}"#).is_err());
}

#[test]
fn files_have_the_public_layout() {
    let folder = tempfile::tempdir().unwrap();
    let config = SynthConfig { grid: 8, count: 3, start: 4, seed: 2, ..SynthConfig::default() };
    let done = std::sync::Mutex::new(Vec::new());
    let paths = generate(&config, folder.path(), |n| done.lock().unwrap().push(n)).unwrap();
    assert_eq!(done.into_inner().unwrap().len(), 3);
    let names: Vec<_> = paths.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["univ_s2_00004.hdf5", "univ_s2_00005.hdf5", "univ_s2_00006.hdf5"]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "no partial file stays");

    let made = universe(&config, 5).unwrap();
    let file = crate::open_file(&paths[1], 0).unwrap();
    let volume = file.volume("full", crate::ChannelAxis::Auto).unwrap();
    assert_eq!(volume.shape(), crate::VolumeShape { channels: 4, extent: [8; 3] });
    assert_eq!(file.labels("unitPar").unwrap(), made.unit);
    assert_eq!(file.floats("physPar").unwrap().unwrap(), made.physical);
    assert_eq!(file.floats("redshifts").unwrap().unwrap(), [0.0, 0.5, 1.5, 3.0]);
    assert_eq!(file.names("namePar").unwrap().unwrap(), ["Omega_m", "sigma_8", "N_spec", "H_0"]);
    let raw = volume.read_raw::<i16>(volume.shape().whole()).unwrap();
    assert!((0..4).all(|c| (0..512).all(|v| raw[c * 512 + v] == made.counts[v * 4 + c])));
    let open = hdf5::File::open(&paths[1]).unwrap();
    assert_eq!(open.attr("dataset_tag").unwrap().read_scalar::<FixedAscii<8>>().unwrap().as_str(), "4parE");
    assert_eq!(open.attr("seed9").unwrap().read_scalar::<i64>().unwrap(), 2);
    assert_eq!(open.attr("universe_tag").unwrap().read_scalar::<FixedAscii<48>>().unwrap().as_str(), "synth_s2-5");
    drop(open);
    drop((file, volume));

    // The same settings give the same bytes.
    let before = fs::read(&paths[1]).unwrap();
    generate(&config, folder.path(), |_| {}).unwrap();
    assert_eq!(before, fs::read(&paths[1]).unwrap());
}

#[test]
fn an_unwritable_folder_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("taken");
    fs::write(&file, "x").unwrap();
    let error = generate(&SynthConfig { grid: 4, count: 1, ..SynthConfig::default() }, file.join("sub"), |_| {}).unwrap_err();
    assert!(matches!(error, SynthError::Io { .. }));
    assert!(error.to_string().contains("taken"));
}
